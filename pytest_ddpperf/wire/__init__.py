"""What crosses a process: how one begins, the channels, how the user's code travels, which of two
trees a module comes from. Standard library and cloudpickle only, for pytest, the rank server and
the ranks use it."""
