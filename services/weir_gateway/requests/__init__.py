"""What a request is once it is checked: its prompt, its options, its tokens and text."""
