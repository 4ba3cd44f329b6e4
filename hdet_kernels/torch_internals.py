"""Every private name of torch that this package uses, with the versions it was seen in and what happens without it.

Nothing else in the package touches a private name of torch. A function here takes and returns public things, so that a
new version of torch that moves a name is answered in this file alone.
"""
