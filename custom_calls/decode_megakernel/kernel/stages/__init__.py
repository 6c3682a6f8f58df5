"""One file per stage, or family of stages with one body: its mathematics, shapes and constraints on top."""
