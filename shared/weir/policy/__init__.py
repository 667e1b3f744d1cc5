"""Policies: who is next (Order), who may join a batch now (Gate), how much prefill goes beside decodes (StepBudget).

One registry of names; all of it pure, so that the scheduler, the engine and the simulator share it.
"""
