"""What an answer's text is made of: content, reasoning and tool calls, told apart as it comes. Pure: text in, events
out."""
