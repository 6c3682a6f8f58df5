"""The persistent kernel in CuTe DSL. Importing a module of this package imports cutlass; nothing else does."""
