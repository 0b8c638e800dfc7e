"""When more may leave, and why: `traffic` answers, `uplink` estimates, `tcp` is the kernel's part."""
