"""The frozen types that cross a process or reach a disk.

Knows nothing of pytest, torch, files or processes. Every time is in seconds unless the name says
otherwise; every nested tuple says its axes in its comment, outermost first.
"""
