import sys, time, json, traceback
if __name__ == "__main__":
    from bed import bed
    from runs import Run, both
    pool = bed()
    for case in json.loads(sys.argv[1]):
        b=time.time()
        run=Run(**case)
        try:
            out = pool.run(run.ranks, both, run, timeout=100)
            f,c=out[0]
            far=max(abs(x-y)/abs(y) for x,y in zip(f.losses,c.losses))
            print(f"{case} {[o[0].device for o in out]} far {far:.1e} scores {float((f.scores-c.scores).abs().max()):.1e} {time.time()-b:.1f}s waits {sum(f.waits.values())}", flush=True)
            if "-v" in sys.argv:
                for k,n in sorted(f.waits.items()): print("     ", n, k)
        except BaseException as e:
            print(f"{case} FAILED {type(e).__name__} {str(e)[:1500]} {time.time()-b:.1f}s", flush=True)
            if "-v" in sys.argv: print("\n".join(getattr(e,"__notes__",[]))[-3000:])
    pool.close()
