"""What the CPU kernels share: which instructions this machine has, how a kernel is compiled and cached, and vector
arithmetic as LLVM IR, since plain loops do not vectorize to integer dot products or to fused multiply-adds.
"""
