"""HDET where people already train: one module for each framework, imported only where it is used."""
