"""What a person at a terminal sees and types: lines with editing, history and completion, answers as they come, status.

Knows no engine: it is given texts and numbers. Answers go to standard output, everything else to standard error, so
that what is piped on is the answer alone.
"""
