"""What is written in C++: built where there is a compiler, and done by torch where not."""
