"""What the bodies of all APIs have in common: how fields are checked and unknown ones told apart, tools, and reasoning.
Each API's own folder reads its own form of them."""
