"""The parts of K3, one concept a file: pure functions of a parameter dict and arrays."""
