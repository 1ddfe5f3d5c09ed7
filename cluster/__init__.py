"""The composition root: command line, launcher, nodes, registry, models; the only package that knows Ray and Redis."""
