"""What the server of helpers.py makes once for the processes that it forks."""
from runtime.tokenizer import Encoder

ENCODER = Encoder()         # takes longer than all else that fineweb.py does in a test
