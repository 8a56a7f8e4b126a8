"""``tailbound top``: how every rank on this host is doing, live."""
