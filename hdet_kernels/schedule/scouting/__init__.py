"""The rounds before a run without a learning rate, in which every replica tries one.

Folder ``scout/`` plans them and chooses. ``phase.py`` goes through them, with their losses in ``round_losses.py``;
``scout_round.py`` compares the replicas at the end of each. ``scouted.py`` is what remains,
``scout_state.py`` its part of a checkpoint.
"""
