"""One job in a process that cannot hurt: started, watched, limited, ended; whatever becomes of it is a result."""
