"""All cases: a module for each kind of habit."""

from cases import buffers as buffers
from cases import callbacks as callbacks
from cases import copies as copies
from cases import datasets as datasets
from cases import draws as draws
from cases import gradients as gradients
from cases import losses as losses
from cases import optimizers as optimizers
from cases import parameters as parameters
from cases import sound as sound
from cases import state as state
from cases import switches as switches
