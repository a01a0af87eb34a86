"""From a call to a backend: the operators that torch sees, which backend runs a call, calls like one before, what `explain` says."""
