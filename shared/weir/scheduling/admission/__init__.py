"""Who may wait, who is given up, and how requests leave."""
