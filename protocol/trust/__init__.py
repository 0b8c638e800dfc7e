"""Who is who: keys, certificates, invites, signatures."""
