"""Declare the arguments of every `planner` command beside the function that runs it.

Modules import what a command needs inside that function, so that `planner --help` stays fast.
"""
