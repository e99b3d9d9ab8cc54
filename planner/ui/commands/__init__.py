"""Declare the arguments of every command beside the function that runs it.

Modules import what a command needs inside that function, so that `headroom --help` stays fast.
"""
