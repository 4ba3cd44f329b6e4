"""HDET where people already train: one module for each framework, imported only where it is used.

``probe.py`` makes a probe of one stored batch, for all of them and for plain loops.
"""
