"""Command line, ini file and marker -> one frozen Settings -> a Plan.

Every pytest run imports `definitions`; `settings` is imported if some were given, or a test needs
them.
"""
