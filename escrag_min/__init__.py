"""escrag_min: a from-scratch reference implementation of ESCRAG-R1 (arXiv 2608.21925)."""
