"""Rotates a step's queries and keys by their positions and puts the keys and values into their pages.
One pass over what the projection of a layer's input gave, before attention reads the pages.
"""
