"""Bytes and seconds of single transfers."""
