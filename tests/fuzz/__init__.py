"""Hostile bytes for everything that reads bytes. A target is a function of bytes with the errors that it may raise; the
same ones run by hypothesis in CI and, guided by coverage, for as long as one likes (`make fuzz`)."""
