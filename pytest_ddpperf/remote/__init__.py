"""Another pytest that runs launches for this one: of another version of the code, or on another
machine.

Knows processes, git, TCP and torchrun's variables; nothing of pytest but how to call it, nothing of
limits.
"""
