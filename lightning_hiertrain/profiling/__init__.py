"""Measures a tier and its links. In: a chain and a step, links. Out: parts of a `Profile`."""
