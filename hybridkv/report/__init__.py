"""What was kept, for people to look at: gathered from a request (`kept.py`) and written as a web page (`page.py`)."""
