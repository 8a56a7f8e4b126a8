"""Generated files of the repository: C and P4 headers, and three pages of docs (``make generate``)."""
