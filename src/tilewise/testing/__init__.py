"""The testing kit: cases, the one tolerance, poison, mutants, and the conformance runs that put a backend through them."""
