"""How long an answer will be, judged by its prompt: what orders, gates and memory tests go by instead of the truth.

numpy alone, so that gateways and the simulator share it; training is another room's (`weir.training`).
"""
