"""`weir top`: a stack watched in the terminal. The command is apart from the view, whose library is slow to load."""
