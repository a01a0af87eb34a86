"""placeholder"""
import time, random
from types import SimpleNamespace
import pytest, torch
from emulator.backend import NEEDED, Emulated
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode.config import configure
from tilewise.backends.hopper.decode.operands import Lengths, Tensors, Window, Work
from tilewise.sm90 import jit
pytestmark = NEEDED
PAGE=64
def arguments(config):
    from tilewise.sm90.dsl import Int32
    tensors, lengths, work, window, *_ = decoding.arguments(config)
    return [jit.tensor(Int32, *(jit.size() for _ in range(4)), aligned=False), tensors, lengths, work, window]
def pieces_of(lengths, columns=1, blocks=4, heads=1, rows=64, queries=1, group=1, least=1, alone=8, most=64):
    config = configure(torch.bfloat16, 128, 128, PAGE)
    ints={"dtype":torch.int32,"device":"cpu"}
    found=torch.full((columns,blocks,most,10),-1,**ints)
    q=torch.zeros(len(lengths),queries,heads*group,8,dtype=torch.bfloat16)
    k=torch.zeros(1,PAGE,heads,8,dtype=torch.bfloat16)
    lse=torch.zeros(len(lengths),heads*group,queries)
    L=Lengths(torch.tensor(lengths,**ints),torch.zeros(len(lengths),-(-max(*lengths,1)//PAGE),**ints),None,None,None,None)
    work=Work(torch.zeros(1,rows,8),torch.zeros(2,1,rows),torch.zeros(1,**ints),columns,blocks,queries,least,0,0,1,0,alone)
    Emulated().compiled("device_functions:launch_pieces",arguments,config)(found,Tensors(q,k,k,q,lse),L,work,Window(-2**30,0))
    return found
def test_it():
    t=time.time()
    f=pieces_of([1024]*4,blocks=9)
    print(time.time()-t)
    for g in f[0]: print([x.tolist() for x in g if x[0]>=0])
    for a in (8,0):
        t=time.time(); f=pieces_of([1024]*64,blocks=132,least=2,alone=a); print(time.time()-t)
        for g in f[0][:4]: print([x.tolist() for x in g if x[0]>=0])
