"""Model families over the layers of `engine/layers`; `families.py` lists them."""
