"""All-reduces over TCP to measure beside Tailbound: schedules of chunks, and our own codec without our transport."""

#: StragglAR; ring, halving-doubling and parameter server; all-to-all and all-gather of our codes of 8 bits.
RIVALS = ("stragglar", "ring", "halving", "server", "quantised")
