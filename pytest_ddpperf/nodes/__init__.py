"""Other machines as processes: torchrun starts a pytest on each, the first leads, the others follow.

Knows TCP and torchrun's variables; nothing of pytest, nothing of limits.
"""
