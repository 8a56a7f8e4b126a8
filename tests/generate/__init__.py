"""Generated files of the repository: C and P4 headers, and tables of three pages of docs (``make generate``)."""
