"""MIDUS: blocks of head-wise memory that are inserted into a pretrained model."""
