"""`dpfed bench`: one private step of a whole fleet beside what others need for the same work, in one run on one machine."""
