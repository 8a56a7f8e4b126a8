"""The demo: real data, a real training, lossy links, Tailbound beside Gloo (``tailbound demo``)."""
