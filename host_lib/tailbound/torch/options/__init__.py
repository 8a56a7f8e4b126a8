"""Options for the algorithm, all opt-in: what a rank contributes, and when an average is applied."""
