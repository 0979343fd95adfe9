"""The makers of tests/vectors: each module writes one part of it with the peers' own packages."""
