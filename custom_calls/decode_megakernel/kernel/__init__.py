"""The persistent kernel in CuTe DSL; geometry, tables and constraints need no cutlass, the rest does."""
