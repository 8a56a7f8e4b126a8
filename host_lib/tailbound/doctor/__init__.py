"""``tailbound doctor``: what this machine can do, which datapath it gets, why, and how to get the better one."""
