"""HDET where people already train: one module for each framework, imported only when it is used."""
