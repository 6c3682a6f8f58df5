"""One persistent kernel for a whole K3 decode step, its schedule as data, and the proof of that schedule.

The schedule (:mod:`.schedule`) is a list of instructions (:mod:`.instructions`). The list is checked
without running it (:mod:`.validate`) and executed on the CPU (:mod:`.interpreter`).
"""
