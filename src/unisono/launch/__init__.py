"""Where a process finds its place, and how several are started."""
