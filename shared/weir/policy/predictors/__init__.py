"""How long an answer will be, judged by its prompt: what orders, gates and memory checks use instead of the truth.

numpy alone, so that gateways and the simulator share it; training is another room's (`weir.training`).
"""
