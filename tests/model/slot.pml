/*
 * Who may move the slot: the protocol by which routers and the operator start and stop the members of
 * one pool, with the parts of Kubernetes that lag behind. README.md says what is modelled and how to run it.
 *
 * One guarded, atomic step = one request to the API server, one probe, or one act of one controller.
 * Everything else may happen between two steps.
 *
 * resourceVersions are kept as one bit a reader: "what I read is still the stored version". A write
 * clears the bits of all readers. That is the whole meaning of a conditional write, and it keeps the
 * number of states finite. As in the API server a patch that changes nothing makes no new version.
 *
 * Switches: sizes and faults below (0 = off); M_... = a mutant, one sentence broken; W_... = the text as
 * first written, without a sentence that this model showed to be needed.
 */

/* ---- sizes ---- */
#ifndef NM
#define NM 2 /* members, 2 or 3; member 0 is the default and the first in the spec */
#endif
#ifndef ROUTERS
#define ROUTERS 2
#endif
#ifndef OPERATOR
#define OPERATOR 0
#endif
#ifndef DEMANDS
#define DEMANDS 2 /* requests held, all told */
#endif

/* ---- faults: how many of each in one run ---- */
#ifndef LATE
#define LATE 0 /* unanswered requests, which may be applied at any later moment or never */
#endif
#ifndef CRASH
#define CRASH 0 /* routers killed */
#endif
#ifndef OPCRASH
#define OPCRASH 0
#endif
#ifndef RESTART
#define RESTART 0 /* how many of the killed come back, under the same Pod name */
#endif
#ifndef RETAKE
#define RETAKE 0 /* another task of the same process takes the Lease anew, under a scaling that goes on */
#endif
#ifndef PAUSE
#define PAUSE 0 /* the Lease runs out although its holder lives */
#endif
#ifndef CUT
#define CUT 0 /* router 0 is cut off from the API server, for a while or for ever */
#endif
#ifndef DELETE
#define DELETE 0 /* the Lease is deleted */
#endif
#ifndef RESTORE
#define RESTORE 0 /* an older copy of the Lease is put in its place (other UID) */
#endif
#ifndef UNDO
#define UNDO 0 /* kubectl rollout undo on a member: older annotation, other template */
#endif
#ifndef FOREIGN
#define FOREIGN 0 /* somebody else scales a member */
#endif
#ifndef HPA
#define HPA 0 /* ... and does so again each time it is put right */
#endif
#ifndef HAND
#define HAND 0 /* a stopped member is scaled to 1 by hand where no router ever was */
#endif
#ifndef FAIL
#define FAIL 0 /* a Pod fails, and stays listed */
#endif
#ifndef NODELOST
#define NODELOST 0 /* the node of the Pods stops answering; containers go on running */
#endif
#ifndef REMOVE
#define REMOVE 0 /* member 0 leaves the spec */
#endif
#ifndef POOLGONE
#define POOLGONE 0 /* the pool is deleted */
#endif
#ifndef SHARED
#define SHARED 0 /* the last member carries another Lease's name and is up for that pool */
#endif
#ifndef COLD
#define COLD 0 /* start with nothing up (else: member 0 is up, nobody's epoch on it) */
#endif
#ifndef NOPROBE
#define NOPROBE 0 /* the members have no idle probe */
#endif
#ifndef LAG
#define LAG 0 /* Deployment and ReplicaSet controllers act on what they read some time ago */
#endif
#ifndef NRS
#define NRS 1 /* ReplicaSets a Deployment; 2 with UNDO */
#endif
#ifndef ISVC
#define ISVC 0 /* members are InferenceServices; that many instances of their controller */
#endif
#ifndef CONFIRM
#define CONFIRM 0 /* after its fence an owner reads the Lease once more, before it does anything */
#endif
#ifndef READFIRST
#define READFIRST 0 /* an owner reads the members before it takes the Lease, not after */
#endif

#define NA (ROUTERS + OPERATOR)
#define OP ROUTERS /* the operator's number as an actor */
#define NONE 7
#define LATEBIT 7

#define BIT(a) (1 << (a))
#define IS(mask, a) (((mask) >> (a)) & 1)
#define SET(mask, a) mask = mask | BIT(a)
#define CLR(mask, a) mask = mask & (255 - BIT(a))
#define FREE(mask, a) mask = mask & (255 - BIT(a))

/*
 * Properties. The number is how the verifier's message tells run_model.py which one was broken.
 */
#define S1 101 /* at most one member has started containers, as far as we put them up */
#define S2 102 /* no unload of ours cuts a stream */
#define S4 104 /* requests go only to a Pod that was proved ready, and was not stopped since by us */
#define S8 108 /* epochs grow */
#define S9 109 /* a deposed writer's write never takes effect */
#define ANNOUNCED 110 /* the record tells of an act before it happens */
#define SHARED_WRITE 111 /* nothing is written over another Lease's name */
#define OPERATOR_ALONE 112 /* the operator never acts beside a router that could */
#define UNASKED 113 /* a lone resident is not unloaded when nobody waits */
#define TARGET_STAYS 114 /* of two that are up the target stays, else the owner, else the default */
#define CONTEST 115 /* no endless fight with another who scales */
#define L1 121 /* everybody is served */
#define L7 127 /* a router that is cut off serves its resident */
#define ENDS 130 /* the pool comes to its proper rest */
#define CHECK(property, holds) assert(property == 0 || (holds))

/* ---- member objects: what routers and operator write ---- */
bit rep[NM];    /* spec.replicas (ModelDeployment: not spec.suspend) */
byte ep[NM];    /* epoch in the annotation, 0 = none */
byte fresh[NM]; /* per reader: its read is the stored version */
byte foreign;   /* members that somebody else has put up */
byte spec;      /* members that the pool's spec lists */
byte downby[NM];
byte fixes;     /* how often we put right what an outsider did */
byte flips;     /* how often an outsider did it */

#if ISVC
bit drep[NM]; /* the Deployment below an InferenceService */
byte dep[NM];
byte dfresh[NM];
#define OREP(m) drep[m]
#define OEP(m) dep[m]
#else
#define OREP(m) rep[m]
#define OEP(m) ep[m]
#endif

/* ---- Deployment and ReplicaSet controllers ---- */
#if LAG
bit tmpl[NM];  /* which of two templates */
bit dobs[NM];  /* status.observedGeneration = generation */
bit dcur[NM];  /* what the controller read is the current generation */
byte dstep[NM];
bit dsee[NM];
bit dnew[NM];  /* template of the newest ReplicaSet, as its status tells */
bit dtsee[NM];
bit rs[NM * NRS];
bit robs[NM * NRS];
bit rcur[NM * NRS];
byte rstep[NM * NRS];
bit rsee[NM * NRS];
#define OBSERVED(m) dobs[m]
#define NEWEST(m) (tmpl[m] % NRS)
#define SHOWN(m) (dnew[m] % NRS)
#else
#define SHOWN(m) 0
#define OBSERVED(m) 1
#define NEWEST(m) 0
#endif
#define P(m, s) ((m) * NRS + (s))

/* ---- Pods: one a ReplicaSet ---- */
#define ABSENT 0
#define PEND 1   /* Pending, nothing started */
#define STARTED 2 /* containers run, the API server still says Pending */
#define RUN 3
#define FAILING 4 /* phase Failed, a container still runs */
#define FAILED 5  /* phase Failed, every container terminated */
byte pst[NM * NRS];
bit pterm[NM * NRS]; /* deletionTimestamp */
byte uok[NM];        /* per router: the Pod it probed is the one that is there */
bit node;            /* lost, until it is deleted or tainted out-of-service */
#define BUSYGPU(p) (pst[p] == STARTED || pst[p] == RUN || pst[p] == FAILING)
#if NRS == 2
#define USES(m) (BUSYGPU(P(m, 0)) || BUSYGPU(P(m, 1)))
#else
#define USES(m) BUSYGPU(P(m, 0))
#endif
#if NM == 3
#define OURS(m) (USES(m) && !IS(foreign, m))
#define OTHERS(m) (OURS(((m) + 1) % 3) || OURS(((m) + 2) % 3))
#define UP (rep[0] + rep[1] + rep[2])
#else
#define OURS(m) (USES(m) && !IS(foreign, m))
#define OTHERS(m) OURS(1 - (m))
#define UP (rep[0] + rep[1])
#endif

/* ---- Lease and record ---- */
bit lex;      /* exists */
byte lh;      /* holder */
bit lexp;     /* 15 s without renewal */
bit l60;      /* free for 60 s */
byte le;      /* record: epoch */
byte lt;      /* record: target */
byte lph;     /* record: phase */
byte lo;      /* record: owner */
bit rheld;    /* record: a router has held it */
byte lfresh;  /* per reader: its read is the stored version */
byte linc;    /* which Lease object this is; stands for its UID */
byte luid;    /* per holder: the object is the one it took */
#define REST 0
#define UNLOAD 1
#define LOAD 2

/* ---- clients ---- */
byte need;    /* members that a held request waits for */
byte st[NM];  /* per router: it has a stream open to this member's Pod */
byte demands = DEMANDS;

/* ---- the request whose answer nobody got ---- */
byte late = LATE;
bit ton;
bit tlease;   /* to the Lease, else to a member */
bit tcreate;
byte tm;
byte tr;      /* 2 = replicas untouched */
byte te;
byte twho;
byte tt;
byte tp;
byte to;

/* ---- actors ---- */
byte pc[NA];
byte idx[NA];   /* member at hand */
byte tgt[NA];
byte mye[NA];
byte maxe[NA];
byte pep[NA];   /* epoch at the time the probe began */
byte evid[NA];  /* resident on ready evidence; NONE = forwards nothing */
byte adm;       /* per router: admission open */
byte own[NA];   /* members this router loaded itself in this epoch: nobody else has dispatched to them */
byte prev[NA];  /* holder before, as far as the Lease told */
byte val[NA];   /* replicas being written */
bit lsaw[NA];   /* the Lease existed when read */
bit sent[NA];   /* the patch at hand went unanswered */
byte cut;       /* routers cut off from the API server */
bit poolgone;
bit heals;      /* the cut, or the loss of the node, comes to an end */

#define DOWN 0
#define STBY 1
#define ACQW 2
#define RDM 3
#define RECE 4
#define FRD 5
#define FWR 6
#define ACT 7
#define CK 8
#define DRAIN 9
#define TELL 10
#define IDLEP 11
#define ANN 12
#define SRD 13
#define SLS 14
#define SWR 15
#define G1 16
#define G2 17
#define G3 18
#define ANNL 19
#define EV 20
#define EVP 21
#define LANDED 22
#define AFTER 23 /* M_RECORD_AFTER_ACT only */
#define CONF 24  /* CONFIRM only */

/* ---- ghosts: what the properties need to know and no program knows ---- */
byte fenced;   /* largest epoch whose fence is complete */
byte gmax;     /* largest epoch ever recorded */
byte gle;      /* largest epoch recorded in this Lease object */
byte gev = NONE; /* resident of router 0 when it was cut off */
byte hand = NONE;
byte crash = CRASH;
byte opcrash = OPCRASH;
byte restart = RESTART;
byte asleep = PAUSE;
byte retake = RETAKE;
byte cutb = CUT;
byte del = DELETE;
byte restore = RESTORE;
byte undo = UNDO;
byte fail = FAIL;
byte lostb = NODELOST;
byte renewals = 1;
byte old_h = NONE;
byte old_e;
hidden byte x;
hidden byte y;
hidden byte z;

#define ISSHARED(m) (SHARED && (m) == NM - 1)
/*
 * An epoch is a number and the Lease object (its UID) under which it was taken; the Lease objects are
 * numbered here. Ours = both agree. Numbers alone are compared for smaller and larger.
 */
#define NUM(e) ((e) / 4)
#ifdef W_EPOCH_WITHOUT_UID
#define EPOCH(number, object) ((number) * 4)
#else
#define EPOCH(number, object) ((number) * 4 + (object))
#endif
#define API(a) (!IS(cut, a))
#ifdef M_UID_NOT_COMPARED
#define MINE(a) (lex && lh == a)
#else
#define MINE(a) (lex && lh == a && IS(luid, a))
#endif

#define INSPEC(m) IS(spec, m)
#if NM == 3
#define STRAY ((rep[0] && !INSPEC(0)) || (rep[1] && !INSPEC(1)) || (rep[2] && !INSPEC(2)))
#define STALE(a) ((ep[0] != mye[a]) || (ep[1] != mye[a]) || (ep[2] != mye[a]))
#else
#define STRAY ((rep[0] && !INSPEC(0)) || (rep[1] && !INSPEC(1)))
#define STALE(a) ((ep[0] != mye[a]) || (ep[1] != mye[a]))
#endif
#ifdef M_CONTEST_GOES_ON
#define CONTESTED 0
#else
#define CONTESTED (flips >= 2)
#endif

inline touch(m) { fresh[m] = 0; }

inline generation(m) {
#if LAG
	dobs[m] = 0;
	dcur[m] = 0;
#endif
	skip
}

/*
 * A write of ours reaches a member. r_ = 2 leaves the replicas alone.
 */
inline effect(m_, r_, e_, who_) {
	if
	:: (r_ == 2 || rep[m_] == r_) && ep[m_] == e_ -> skip /* no change, no new version */
	:: else ->
		/* MemberShared: never a write over another Lease's name */
		CHECK(SHARED_WRITE, !ISSHARED(m_));
		/* S9: an epoch on a member never goes back by our doing */
		CHECK(S9, NUM(e_) >= NUM(ep[m_]));
		if
		:: r_ != 2 && rep[m_] != r_ ->
			/* S9: nothing decided under an older epoch takes effect once a newer one is fenced */
			CHECK(S9, NUM(e_) >= NUM(fenced));
			/* the record announces what is done */
			CHECK(ANNOUNCED, !(lex && le == e_ && luid == BIT(who_) && mye[who_] == e_) || (r_ == 0 && lph == UNLOAD) || (r_ == 1 && lph == LOAD && lt == m_));
			if
			:: r_ == 0 ->
				/* S2: no stream is cut by a member's unload */
				CHECK(S2, st[m_] == 0);
				CHECK(UNASKED, (need & spec & (255 - BIT(m_))) || UP >= 2 || STRAY || REMOVE || POOLGONE || FOREIGN || UNDO || CONTESTED);
				downby[m_] = who_
			:: else ->
				/* S1: every other member is gone, whatever the record or a list once said */
				CHECK(S1, !OTHERS(m_))
			fi;
			if
			:: flips > 0 && IS(foreign, m_) -> fixes++
			:: else
			fi;
			rep[m_] = r_;
			if
			:: r_ == 1 -> FREE(foreign, m_)
			:: else
			fi;
#if !ISVC
			generation(m_)
#endif
		:: else
		fi;
		ep[m_] = e_;
		touch(m_)
	fi
}

inline lease_write(who_, e_, t_, p_, o_) {
	if
	:: !lex -> gle = 0; luid = 0; linc++
	:: else
	fi;
	CHECK(S8, NUM(e_) >= NUM(gle)); /* S8: the epoch in the record never goes back */
	gle = e_;
	lex = 1;
	lh = who_;
	lexp = 0;
	l60 = 0;
	le = e_;
	lt = t_;
	lph = p_;
	lo = o_;
	lfresh = BIT(who_);
	luid = BIT(who_);
	if
	:: who_ < ROUTERS -> rheld = 1
	:: else
	fi
}

/* A write to the Lease is accepted if what was read is stored still: that version, or no Lease. */
#define TAKEOK(a) ((lsaw[a] && lex && IS(lfresh, a)) || (!lsaw[a] && !lex))
#ifdef M_RECORD_UNCONDITIONAL
#define LEASEOK(a) 1
#else
#define LEASEOK(a) TAKEOK(a)
#endif

/* A member write may be applied if its read is the stored version. */
#if defined(M_WRITE_UNCONDITIONAL)
#define FRESHSCALE(a, m) 1
#else
#define FRESHSCALE(a, m) IS(fresh[m], a)
#endif
#if defined(M_FENCE_UNCONDITIONAL)
#define FRESHFENCE(a, m) 1
#else
#define FRESHFENCE(a, m) IS(fresh[m], a)
#endif

inline stand_by(a) {
	/* Another holder was seen: forwards nothing. Streams that run go on. */
#ifndef M_STANDBY_FORWARDS
	evid[a] = NONE;
	CLR(adm, a);
#endif
	own[a] = 0;
	sent[a] = 0;
	idx[a] = 0;
	val[a] = 0;
	tgt[a] = 0;
	maxe[a] = 0;
	pep[a] = 0;
	pc[a] = STBY
}

inline lost(a) {
	if
	:: lex && lh != a && lh != NONE && API(a) -> stand_by(a)
	:: else -> /* stops actuation only */
#ifdef M_LOSS_STOPS_SERVING
		evid[a] = NONE;
#endif
		if
		:: evid[a] != NONE -> SET(adm, a)
		:: else
		fi;
		own[a] = 0;
		sent[a] = 0;
		idx[a] = 0;
		val[a] = 0;
		tgt[a] = 0;
		maxe[a] = 0;
		pep[a] = 0;
		pc[a] = STBY
	fi
}

/* router r is told by a that somebody else owns the slot, and stands by before it answers */
#ifdef W_ONLY_PREVIOUS_TOLD
#define TOLD(a, r) (a != r && pc[r] != DOWN && prev[a] == r)
#else
#define TOLD(a, r) (a != r && pc[r] != DOWN)
#endif
#if defined(W_ASKED_NOT_TOLD) && ROUTERS == 2
#define HEARD(a) ((a == 0 || evid[0] == NONE) && (a == 1 || evid[1] == NONE))
#else
#define HEARD(a) 1
#endif

#if ROUTERS == 2
#define PEER(a) (1 - (a))
#define PEERDEAD(a) (a == OP && OPERATOR -> (pc[0] == DOWN && pc[1] == DOWN) : pc[PEER(a)] == DOWN)
#elif ROUTERS == 1
#define PEERDEAD(a) (a == OP && OPERATOR -> pc[0] == DOWN : 1)
#else
#define PEERDEAD(a) 1
#endif
#define PREVDEAD(a) (prev[a] == NONE || prev[a] >= ROUTERS || prev[a] == a || pc[prev[a]] == DOWN)

/* No router that could take the Lease is there: only then does it stay free for 60 s. */
#if ROUTERS == 2
#define NOROUTER ((pc[0] == DOWN || IS(cut, 0)) && (pc[1] == DOWN || IS(cut, 1)))
#elif ROUTERS == 1
#define NOROUTER (pc[0] == DOWN || IS(cut, 0))
#else
#define NOROUTER 1
#endif

#define DEFAULT (INSPEC(0) -> 0 : 1)
#ifdef M_NO_COLD_DEFAULT
#define ISCOLD 0
#else
#define ISCOLD (UP == 0 && (lph == REST || lt == NONE || !INSPEC(lt)))
#endif
#ifdef M_HALF_SWAP_LEFT
#define ISHALF 0
#else
#define ISHALF (UP == 0 && lph != REST && lt != NONE && INSPEC(lt))
#endif
#ifdef M_TWO_UP_LEFT
#define ISTWO 0
#else
#define ISTWO (UP >= 2)
#endif
#ifdef M_REMOVED_LEFT
#define ISSTRAY 0
#else
#define ISSTRAY STRAY
#endif
#ifdef M_FOREIGN_LEFT
#undef ISTWO
#define ISTWO 0
#endif
#define CHORES (ISCOLD || ISHALF || ISTWO || ISSTRAY)
#ifdef M_ROUTER_LEAVES_CHORES
#define MYCHORES(a) (CHORES && a == OP)
#else
#define MYCHORES(a) CHORES
#endif
#ifdef M_OWN_NAME_AWAITED
#define OWN_NAME(a) 0
#else
#define OWN_NAME(a) (lh == a)
#endif
#ifdef M_OPERATOR_AT_ONCE
#define OPMAY (lexp || !lex || lh == NONE)
#else
#define OPMAY l60
#endif

/* an owner that is in the spec, or else the default (in the model the first of the spec, too) */
#ifdef M_TWO_UP_DEFAULT_BEFORE_OWNER
#define OWNER_STAYS 0
#else
#define OWNER_STAYS (lo != NONE && INSPEC(lo))
#endif
#ifdef M_TWO_UP_LAST_STAYS
#define OTHERWISE (NM - 1)
#else
#define OTHERWISE DEFAULT
#endif
#define ANNOUNCED_LOAD (lph == LOAD && lt != NONE && INSPEC(lt))

/* who stays when two are up and nobody waits */
inline choose_stay(a) {
	if
	:: a == OP && hand != NONE && !rheld && lo != NONE ->
#ifdef M_HAND_IS_UNDONE
		tgt[a] = lo
#else
		/* where no router ever held the Lease, the member put up by hand is demand */
		x = 0;
		do
		:: x < NM && rep[x] && x != lo -> tgt[a] = x; break
		:: x < NM && !(rep[x] && x != lo) -> x++
		:: x >= NM -> tgt[a] = lo; break
		od;
		x = 0
#endif
	:: else ->
		if
#ifndef M_TWO_UP_OWNER_STAYS
		:: ANNOUNCED_LOAD -> tgt[a] = lt
		:: !ANNOUNCED_LOAD && OWNER_STAYS -> tgt[a] = lo
#else
		:: OWNER_STAYS -> tgt[a] = lo
#endif
		:: else -> tgt[a] = OTHERWISE
		fi;
		CHECK(TARGET_STAYS, !ANNOUNCED_LOAD || tgt[a] == lt);
		CHECK(TARGET_STAYS, ANNOUNCED_LOAD || lo == NONE || !INSPEC(lo) || tgt[a] == lo);
		CHECK(TARGET_STAYS, ANNOUNCED_LOAD || (lo != NONE && INSPEC(lo)) || tgt[a] == DEFAULT)
	fi
}

inline begin(a) {
	idx[a] = 0;
	sent[a] = 0;
	pc[a] = CK
}

inline next_member(a) {
	idx[a]++;
	if
	:: idx[a] == NM -> idx[a] = 0; pc[a] = ANNL
	:: else -> pc[a] = CK
	fi
}

inline fence_done(a) {
	idx[a] = 0;
	if
	:: NUM(mye[a]) > NUM(fenced) -> fenced = mye[a]
	:: else
	fi;
	pc[a] = ACT
}

inline next_fence(a) {
	idx[a]++;
	if
#ifdef M_FIRST_ACKNOWLEDGEMENT_IS_ENOUGH
	:: idx[a] < NM -> fence_done(a)
#endif
#if CONFIRM
	:: idx[a] == NM -> idx[a] = 0; pc[a] = CONF
#else
	:: idx[a] == NM -> fence_done(a)
#endif
#ifndef M_FIRST_ACKNOWLEDGEMENT_IS_ENOUGH
	:: else -> pc[a] = FRD
#endif
	fi
}

inline unanswered(a, islease, m_, r_, e_, t_, p_, o_) {
	late--;
	ton = 1;
	tlease = islease;
	tcreate = islease && !lsaw[a];
	tm = m_;
	tr = r_;
	te = e_;
	twho = a;
	tt = t_;
	tp = p_;
	to = o_;
	if
	:: islease && IS(lfresh, a) -> SET(lfresh, LATEBIT)
	:: islease && !IS(lfresh, a) -> FREE(lfresh, LATEBIT)
	:: !islease && IS(fresh[m_], a) -> SET(fresh[m_], LATEBIT)
	:: else -> FREE(fresh[m_], LATEBIT)
	fi
}

/*
 * Neither ours nor smaller: somebody else owned the slot since we read the members. No write; the Lease
 * is taken anew, with an epoch above that one.
 */
#define FOREIGN_EPOCH(a, e) (e != mye[a] && NUM(e) >= NUM(mye[a]))

/* the member that a scaling is about: the target when it goes up, else the one at hand */
#define MEM(a) (val[a] -> tgt[a] : idx[a])

#ifdef M_TERMINAL_IS_LIVE
#define ISGONE(p) (pst[p] == ABSENT)
#elif defined(M_TERMINAL_PHASE_ALONE)
#define ISGONE(p) (pst[p] == ABSENT || pst[p] == FAILED || pst[p] == FAILING)
#elif defined(M_PENDING_IS_GONE)
#define ISGONE(p) (pst[p] == ABSENT || pst[p] == FAILED || pst[p] == PEND || pst[p] == STARTED)
#elif defined(M_LIST_OF_THE_PAST)
/* the list is answered from a cache that does not have the youngest Pod yet */
#define ISGONE(p) (pst[p] == ABSENT || pst[p] == FAILED || pst[p] == PEND)
#elif defined(M_LOST_NODE_IS_GONE)
#define ISGONE(p) (pst[p] == ABSENT || pst[p] == FAILED || (node == 1 && pterm[p]))
#elif defined(M_NO_LIST)
#define ISGONE(p) 1
#else
#define ISGONE(p) (pst[p] == ABSENT || pst[p] == FAILED)
#endif

#if NRS == 2
#define ALLGONE(m) (ISGONE(P(m, 0)) && ISGONE(P(m, 1)))
#define FOUND_OLD(m) (pst[P(m, 1 - NEWEST(m))] == RUN)
#else
#define ALLGONE(m) ISGONE(P(m, 0))
#define FOUND_OLD(m) 0
#endif
#ifdef M_PROBE_BEFORE_EPOCH
#define EARLIER_PROBE(a, m) IS(uok[m], a)
#else
#define EARLIER_PROBE(a, m) 0
#endif
#define PODOK(m, s) (pst[P(m, s)] == RUN && !pterm[P(m, s)])
#define POD_FOUND(m) (pst[P(m, NEWEST(m))] == RUN || FOUND_OLD(m))

#ifdef M_SMALLER_EPOCH_TRUSTED
#define BLINDLY 1
#else
#define BLINDLY 0
#endif

#ifdef M_VANISHED_LEASE_KEPT
#define NOTICED(a) (lex && lh != a)
#else
#define NOTICED(a) (!MINE(a))
#endif
#ifdef M_STANDBY_FORWARDS
#define SEES_OTHER(a) 0
#else
#define SEES_OTHER(a) (lex && lh != a && lh != NONE)
#endif

/* our own leases of the member at hand have ended */
#ifdef M_FOREIGN_CORRECTED_BUSY
#define DRAINED(a) 1
#else
#define DRAINED(a) (!IS(st[idx[a]], a))
#endif

/* who did not dispatch the requests itself: may it unload the member at hand? */
#if defined(M_UNLOAD_WITHOUT_PROBE) || defined(M_FOREIGN_CORRECTED_BUSY)
#define MAY_UNLOAD(a) 1
#elif !NOPROBE
#define MAY_UNLOAD(a) (st[idx[a]] == 0)
#elif defined(M_OPERATOR_UNLOADS_UNPROBED)
#define MAY_UNLOAD(a) (a == OP || PEERDEAD(a))
#elif defined(M_UNPROBED_AT_ONCE)
#define MAY_UNLOAD(a) (a < ROUTERS)
#elif defined(W_ONLY_PREVIOUS_HOLDER)
#define MAY_UNLOAD(a) (a < ROUTERS && PREVDEAD(a))
#else
#define MAY_UNLOAD(a) (a < ROUTERS && PEERDEAD(a))
#endif

/* proven gone, first part: the object that owns the Pods is at 0 under our epoch */
#ifdef M_UNANSWERED_UNLOAD_COUNTS
#define HASTY 1
#else
#define HASTY 0
#endif
#if HASTY
#define AT_ZERO(a, m) 1
#elif defined(M_GONE_BY_SERVICE_OBJECT)
#define AT_ZERO(a, m) (rep[m] == 0 && ep[m] == mye[a])
#elif defined(M_SMALLER_EPOCH_TRUSTED)
#define AT_ZERO(a, m) (rep[m] == 0 && OREP(m) == 0)
#else
#define AT_ZERO(a, m) (rep[m] == 0 && ep[m] == mye[a] && OREP(m) == 0 && OEP(m) == mye[a])
#endif
#ifdef M_GENERATION_NOT_AWAITED
#define AWAITED(m) 1
#else
#define AWAITED(m) OBSERVED(m)
#endif
#if !LAG || defined(M_REPLICASET_IGNORED)
#define SET_AT_ZERO(p) 1
#elif defined(M_REPLICASET_NOT_AWAITED)
#define SET_AT_ZERO(p) (rs[p] == 0)
#else
#define SET_AT_ZERO(p) (rs[p] == 0 && robs[p])
#endif
#if NRS == 2 && !defined(M_OLD_REPLICASET_IGNORED)
#define SETS_AT_ZERO(m) (SET_AT_ZERO(P(m, 0)) && SET_AT_ZERO(P(m, 1)))
#else
#define SETS_AT_ZERO(m) SET_AT_ZERO(P(m, NEWEST(m)))
#endif

#ifdef M_LIST_FIRST
#define PROOF G3
#define AFTER_LIST pc[a] = G1
#define AFTER_SETS next_member(a)
#else
#define PROOF G1
#define AFTER_LIST next_member(a)
#define AFTER_SETS pc[a] = G3
#endif

/* ready evidence, when our probe of the Pod has come back with success */
#define PROVED(m) PODOK(m, NEWEST(m))
#if defined(W_POD_OF_OLD_TEMPLATE) && NRS == 2
#define EVPOD(m) (PODOK(m, 0) || PODOK(m, 1))
#elif defined(M_TERMINATING_IS_READY)
#define EVPOD(m) (pst[P(m, SHOWN(m))] == RUN)
#else
#define EVPOD(m) PODOK(m, SHOWN(m))
#endif
#ifdef M_GENERATION_NOT_OBSERVED
#define EVGEN(m) 1
#else
#define EVGEN(m) OBSERVED(m)
#endif
#ifdef M_READY_WITHOUT_EPOCH
#define EVEP(a, m) 1
#elif defined(M_SMALLER_EPOCH_TRUSTED)
#define EVEP(a, m) 1
#else
#define EVEP(a, m) (OEP(m) == mye[a])
#endif
#ifdef W_REPLICAS_NOT_LOOKED_AT
#define REPBLIND 1
#define EVREP(m) 1
#else
#define REPBLIND 0
#define EVREP(m) (rep[m] == 1 && OREP(m) == 1)
#endif
#ifdef M_PROBE_NOT_OF_THIS_POD
#define SAMEPOD(a, m) 1
#else
#define SAMEPOD(a, m) IS(uok[m], a)
#endif
#ifdef M_ONLY_OWN_LOAD_IS_READY
#define ADOPTS(a, m) IS(own[a], m)
#else
#define ADOPTS(a, m) 1
#endif
#define READY(a, m) (SAMEPOD(a, m) && ADOPTS(a, m) && EVREP(m) && EVEP(a, m) && EVGEN(m) && EVPOD(m))

proctype Actor(byte a)
{
end:
	do
	/* ---------- the Lease ---------- */
	:: atomic { /* another holder, or no Lease, is seen by the watch */
		pc[a] >= RDM && API(a) && NOTICED(a) -> lost(a) }
#if CUT
	:: atomic { /* 15 s by its own clock without an answer */
		pc[a] >= RDM && !API(a) -> lost(a) }
#endif
	:: atomic { /* ... also by one that lost it before and went on serving */
		pc[a] == STBY && a < ROUTERS && API(a) && evid[a] != NONE && SEES_OTHER(a) -> stand_by(a) }
	:: atomic { /* renewal, in time again */
		pc[a] >= RDM && API(a) && MINE(a) && lexp -> lexp = 0; l60 = 0; lfresh = BIT(a) }
#if RETAKE
	:: atomic { pc[a] >= SRD && pc[a] <= SWR && retake > 0 && API(a) && MINE(a) ->
		retake--;
		y = EPOCH(NUM(gmax) + 1, linc);
		gmax = y;
		fenced = y;
		lease_write(a, y, lt, lph, lo);
		x = 0;
		do
		:: x < NM -> ep[x] = y; touch(x); x++
		:: else -> break
		od;
		x = 0;
		y = 0 }
#endif
#ifdef M_RENEWED_BY_ANOTHER_TASK
	:: atomic { /* a task of its own renews, with the record as it once read it */
		pc[a] >= FRD && MINE(a) && renewals > 0 && maxe[a] < NUM(le) -> renewals--; z = EPOCH(maxe[a], linc); lease_write(a, z, lt, lph, lo); z = 0 }
#endif
	:: atomic { /* free, run out, or mine under this name */
		pc[a] == STBY && API(a) && !poolgone && (!lex || lh == NONE || lexp || OWN_NAME(a)) &&
		(a < ROUTERS || (OPMAY && CHORES)) ->
		SET(lfresh, a);
		lsaw[a] = lex;
		prev[a] = lh;
		mye[a] = 0;
#ifdef M_EPOCH_FROM_MEMBERS_ONLY
		maxe[a] = 0;
#else
		maxe[a] = NUM(le);
#endif
		idx[a] = 0;
#ifdef M_SAME_EPOCH_AFTER_RESTART
		if
		:: lex && lh == a && le > 0 -> lexp = 0; SET(luid, a); mye[a] = le; fence_done(a)
		:: else -> pc[a] = ACQW
		fi
#elif READFIRST
		pc[a] = RDM
#else
		pc[a] = ACQW
#endif
	}
#if !READFIRST
	:: atomic { pc[a] == ACQW && API(a) ->
		if
		:: TAKEOK(a) ->
			/* J1: the operator never acts beside a router that could */
			CHECK(OPERATOR_ALONE, !(a == OP && OPERATOR && !l60 && !NOROUTER));
			lease_write(a, le, lt, lph, lo);
			lsaw[a] = 1;
			pc[a] = RDM
		:: else -> pc[a] = STBY
		fi }
	:: atomic { pc[a] == ACQW && API(a) && late > 0 && !ton ->
		unanswered(a, 1, 0, 0, le, lt, lph, lo) }
#endif
	/* ---------- the epoch ---------- */
	:: atomic { pc[a] == RDM && API(a) ->
#ifndef M_EPOCH_FROM_RECORD_ONLY
		if
		:: NUM(ep[idx[a]]) > maxe[a] -> maxe[a] = NUM(ep[idx[a]])
		:: else
		fi;
#endif
		idx[a]++;
		if
		:: idx[a] == NM -> idx[a] = 0; pc[a] = RECE
		:: else
		fi }
	:: atomic { pc[a] == RECE && API(a) ->
		if
		:: LEASEOK(a) ->
			y = (lex -> linc : linc + 1);
			y = EPOCH(maxe[a] + 1, y);
			CHECK(S8, !lex || NUM(y) > NUM(gle)); /* under one Lease object numbers strictly grow */
			if
			:: NUM(y) > NUM(gmax) -> gmax = y
			:: else
			fi;
			lease_write(a, y, lt, lph, lo);
			lsaw[a] = 1;
			mye[a] = y;
			y = 0;
#ifdef M_NO_FENCE
			fence_done(a)
#else
			pc[a] = FRD
#endif
		:: else -> lost(a)
		fi }
	/* ---------- the fence ---------- */
#if CONFIRM
	:: atomic { pc[a] == CONF && API(a) && !poolgone ->
		if
		:: MINE(a) && le == mye[a] -> fence_done(a)
		:: else -> lost(a)
		fi }
#endif
	:: atomic { pc[a] == FRD && API(a) && !poolgone ->
		if
		:: ISSHARED(idx[a]) ->
#ifdef M_SHARED_MEMBER_WRITTEN
			SET(fresh[idx[a]], a); pc[a] = FWR
#else
			next_fence(a)
#endif
#ifdef M_NO_FENCE_ON_STOPPED
		:: !ISSHARED(idx[a]) && !rep[idx[a]] -> next_fence(a)
#endif
#ifdef M_NO_FENCE_ON_RESIDENT
		:: !ISSHARED(idx[a]) && rep[idx[a]] -> next_fence(a)
#endif
		:: else ->
			if
			:: FOREIGN_EPOCH(a, ep[idx[a]]) -> lost(a)
			:: ep[idx[a]] == mye[a] -> next_fence(a)
#ifdef M_SMALLER_EPOCH_TRUSTED
			:: ep[idx[a]] > 0 && NUM(ep[idx[a]]) < NUM(mye[a]) -> next_fence(a)
#endif
#ifdef M_MISSING_EPOCH_TRUSTED
			:: ep[idx[a]] == 0 -> next_fence(a)
#endif
			:: else -> SET(fresh[idx[a]], a); pc[a] = FWR
			fi
		fi }
	:: atomic { pc[a] == FWR && API(a) ->
		if
		:: FRESHFENCE(a, idx[a]) ->
			effect(idx[a], 2, mye[a], a);
			next_fence(a)
		:: else -> pc[a] = FRD
		fi }
	:: atomic { pc[a] == FWR && API(a) && late > 0 && !ton ->
		unanswered(a, 0, idx[a], 2, mye[a], 0, 0, 0);
#ifdef M_UNANSWERED_FENCE_COUNTS
		next_fence(a)
#endif
	}
	/* ---------- decisions ---------- */
#if ROUTERS
	:: atomic { /* a request waits for a member that is not resident, and none for the resident (H3) */
		pc[a] == ACT && a < ROUTERS && !CONTESTED && !poolgone && (need & spec) != 0 && !IS(need, evid[a]) ->
		if
		:: IS(need & spec, 0) -> tgt[a] = 0
		:: IS(need & spec, 1) -> tgt[a] = 1
#if NM == 3
		:: IS(need & spec, 2) -> tgt[a] = 2
#endif
		fi;
		begin(a) }
#endif
	:: atomic { /* nobody waits: cold default, swap left half done, two up, removed resident */
		pc[a] == ACT && API(a) && !CONTESTED && !poolgone && (a == OP || (need & spec) == 0) && MYCHORES(a) && !(SHARED) ->
		if
		:: ISSTRAY && UP >= 2 && ISTWO -> choose_stay(a)
		:: ISSTRAY && !(UP >= 2 && ISTWO) -> tgt[a] = DEFAULT
		:: !ISSTRAY && ISTWO -> choose_stay(a)
		:: !ISSTRAY && !ISTWO && ISHALF -> tgt[a] = lt
		:: else -> tgt[a] = DEFAULT
		fi;
		begin(a) }
#ifdef M_DEFAULT_MOVES_WARM_POOL
	:: atomic { pc[a] == ACT && API(a) && need == 0 && UP == 1 && !rep[1] -> tgt[a] = 1; begin(a) }
#endif
#if OPERATOR
	:: atomic { /* the operator gives the Lease back when nothing is left to do */
		a == OP && pc[a] == ACT && API(a) && !(MYCHORES(a)) ->
		if
		:: MINE(a) -> lh = NONE; lexp = 0; l60 = 0; lfresh = 0; luid = 0
		:: else
		fi;
		stand_by(a) }
#endif
	:: atomic { /* the watch shows that the resident no longer carries our epoch (rollout undo) */
		pc[a] == ACT && API(a) && evid[a] != NONE && ep[evid[a]] != mye[a] && !BLINDLY ->
		x = evid[a];
		evid[a] = NONE;
		tgt[a] = x;
		x = 0;
		begin(a) }
	/* ---------- every other member: stop it, prove it gone ---------- */
	:: atomic { pc[a] == CK && API(a) ->
		if
		:: poolgone -> lost(a)
		:: !poolgone && CONTESTED -> pc[a] = ACT
		:: !poolgone && !CONTESTED && (idx[a] == tgt[a] || ISSHARED(idx[a])) -> next_member(a)
		:: !poolgone && !CONTESTED && idx[a] != tgt[a] && !ISSHARED(idx[a]) && rep[idx[a]] -> val[a] = 0; pc[a] = DRAIN
#ifdef M_SMALLER_EPOCH_TRUSTED
		:: else -> pc[a] = PROOF
#else
		:: else ->
			if
			:: FOREIGN_EPOCH(a, ep[idx[a]]) -> lost(a)
			:: NUM(ep[idx[a]]) < NUM(mye[a]) -> val[a] = 0; pc[a] = SRD
			:: ep[idx[a]] == mye[a] -> pc[a] = PROOF
			fi
#endif
		fi }
	:: atomic { /* admission closes, our own leases end */
		pc[a] == DRAIN && DRAINED(a) ->
		if
		:: evid[a] == idx[a] -> CLR(adm, a)
		:: else
		fi;
		if
		:: IS(own[a], idx[a]) -> pc[a] = ANN
		:: else -> pc[a] = TELL
		fi }
	:: atomic { /* every other router Pod has answered "standby", or is proven gone */
		pc[a] == TELL && HEARD(a) ->
#ifndef W_NOBODY_TOLD
#if ROUTERS >= 1
		if
		:: TOLD(a, 0) -> stand_by(0)
		:: else
		fi;
#endif
#if ROUTERS == 2
		if
		:: TOLD(a, 1) -> stand_by(1)
		:: else
		fi;
#endif
#endif
		pc[a] = IDLEP }
	:: atomic { pc[a] == IDLEP && MAY_UNLOAD(a) -> pc[a] = ANN }
	:: atomic { /* announce the unload */
		pc[a] == ANN && API(a) ->
#ifdef M_RECORD_AFTER_ACT
		pc[a] = SRD
#else
		if
		:: LEASEOK(a) && MINE(a) -> lease_write(a, le, tgt[a], UNLOAD, lo); pc[a] = SRD
		:: !(LEASEOK(a) && MINE(a)) && MINE(a) && le == mye[a] -> SET(lfresh, a)
		:: else -> lost(a)
		fi
#endif
	}
	:: atomic { pc[a] == ANN && API(a) && late > 0 && !ton && MINE(a) ->
		unanswered(a, 1, 0, 0, le, tgt[a], UNLOAD, lo) }
	/* ---------- a scaling: read the member, read the Lease live, one conditional patch ---------- */
	:: atomic { pc[a] == SRD && API(a) ->
		if
		:: poolgone -> lost(a)
		:: !poolgone && CONTESTED -> val[a] = 0; pc[a] = ACT
#ifndef W_OTHER_EPOCH_OVERWRITTEN
		:: !poolgone && !CONTESTED && FOREIGN_EPOCH(a, ep[MEM(a)]) -> lost(a)
#endif
		:: !poolgone && !CONTESTED && ep[MEM(a)] == mye[a] && rep[MEM(a)] == val[a] ->
			pc[a] = (val[a] -> EV : PROOF)
		:: else ->
#ifndef M_LEASE_BEFORE_MEMBER
			SET(fresh[MEM(a)], a);
			pc[a] = SLS
#else
			if
			:: MINE(a) && le == mye[a] -> pc[a] = SLS
			:: else -> lost(a)
			fi
#endif
		fi }
	:: atomic { pc[a] == SLS && API(a) ->
		if
#ifdef M_LEASE_NOT_READ
		:: 1 -> pc[a] = SWR
#elif defined(M_LEASE_BEFORE_MEMBER)
		:: 1 -> SET(fresh[MEM(a)], a); pc[a] = SWR
#elif defined(M_VANISHED_LEASE_KEPT)
		:: !lex || (lh == a && le == mye[a]) -> pc[a] = SWR
		:: lex && !(lh == a && le == mye[a]) -> lost(a)
#elif defined(M_EPOCH_NOT_COMPARED)
		:: MINE(a) -> pc[a] = SWR
		:: !MINE(a) -> lost(a)
#else
		:: MINE(a) && le == mye[a] -> pc[a] = SWR
		:: else -> lost(a)
#endif
		fi }
	:: atomic { pc[a] == SWR && API(a) ->
		if
		:: val[a] == 0 && evid[a] == idx[a] -> evid[a] = NONE; CLR(adm, a)
		:: else
		fi;
		if
		:: FRESHSCALE(a, MEM(a)) ->
			z = MEM(a);
			effect(z, val[a], mye[a], a);
			z = 0;
			sent[a] = 0;
			if
			:: val[a] == 0 -> CLR(own[a], idx[a]); pc[a] = PROOF
			:: else -> SET(own[a], tgt[a]); pc[a] = EV
			fi
		:: else ->
			sent[a] = 0;
#ifdef M_CONFLICT_RETRIED_BLINDLY
			SET(fresh[MEM(a)], a) /* the new version taken from the answer, nothing read or checked again */
#else
			pc[a] = SRD
#endif
		fi }
	:: atomic { pc[a] == SWR && API(a) && late > 0 && !ton ->
		if
		:: val[a] == 0 && evid[a] == idx[a] -> evid[a] = NONE; CLR(adm, a)
		:: else
		fi;
		z = MEM(a);
		unanswered(a, 0, z, val[a], mye[a], 0, 0, 0);
		z = 0;
#ifdef M_UNANSWERED_UNLOAD_COUNTS
		if
		:: val[a] == 0 -> pc[a] = PROOF
		:: else -> sent[a] = 1
		fi
#elif defined(M_UNANSWERED_SCALING_FORGOTTEN)
		pc[a] = ACT /* decides afresh, as if it had not been sent */
#else
		sent[a] = 1 /* in flight: the same patch again until it is answered */
#endif
	}
	/* ---------- proven gone, in this order ---------- */
	:: atomic { (pc[a] == G1 || pc[a] == G2 || pc[a] == G3) && API(a) && (rep[idx[a]] != 0 || ep[idx[a]] != mye[a]) && !BLINDLY && !HASTY -> pc[a] = CK }
	:: atomic { pc[a] == G1 && API(a) && AT_ZERO(a, idx[a]) && AWAITED(idx[a]) -> pc[a] = G2 }
	:: atomic { pc[a] == G2 && API(a) && SETS_AT_ZERO(idx[a]) -> AFTER_SETS }
	:: atomic { pc[a] == G3 && API(a) && ALLGONE(idx[a]) -> AFTER_LIST }
	/* ---------- load the target ---------- */
	:: atomic { pc[a] == ANNL && API(a) ->
		if
		:: rep[tgt[a]] == 1 && ep[tgt[a]] == mye[a] -> pc[a] = EV
#ifdef W_REPLICAS_NOT_LOOKED_AT
		:: rep[tgt[a]] == 0 && ep[tgt[a]] == mye[a] && POD_FOUND(tgt[a]) -> pc[a] = EV
#endif
		:: else ->
#ifdef M_RECORD_AFTER_ACT
			val[a] = 1;
			pc[a] = SRD
#else
			if
			:: LEASEOK(a) && MINE(a) -> lease_write(a, le, tgt[a], LOAD, lo); val[a] = 1; pc[a] = SRD
			:: !(LEASEOK(a) && MINE(a)) && MINE(a) && le == mye[a] -> SET(lfresh, a)
			:: else -> lost(a)
			fi
#endif
		fi }
	/* ---------- ready evidence: the Pod is looked up, then probed ---------- */
	:: atomic { pc[a] == EV && API(a) && ((rep[tgt[a]] == 0 && (!REPBLIND || !POD_FOUND(tgt[a]))) || (ep[tgt[a]] != mye[a] && !BLINDLY)) ->
		val[a] = 0;
		pc[a] = ACT;
		if
		:: rep[tgt[a]] == 1 && ep[tgt[a]] != mye[a] && !poolgone -> idx[a] = 0; pc[a] = CK
		:: else
		fi }
	:: atomic { pc[a] == EV && API(a) && POD_FOUND(tgt[a]) && !EARLIER_PROBE(a, tgt[a]) && (REPBLIND || (rep[tgt[a]] && (ep[tgt[a]] == mye[a] || BLINDLY))) ->
		pep[a] = mye[a];
		SET(uok[tgt[a]], a);
		pc[a] = EVP }
#ifdef M_NO_OWN_PROBE
	:: atomic { pc[a] == EV && API(a) && rep[tgt[a]] == 1 && OEP(tgt[a]) == mye[a] && OBSERVED(tgt[a]) && POD_FOUND(tgt[a]) -> /* its status says Ready */
		if
		:: a < ROUTERS -> evid[a] = tgt[a]; SET(adm, a)
		:: else
		fi;
		val[a] = 0;
		pc[a] = LANDED }
#endif
	:: atomic { pc[a] == EV && EARLIER_PROBE(a, tgt[a]) -> pc[a] = EVP }
	:: atomic { pc[a] == EVP && !SAMEPOD(a, tgt[a]) -> pc[a] = EV }
	:: atomic { pc[a] == EVP && API(a) && rep[tgt[a]] == 0 && (!REPBLIND || !PODOK(tgt[a], SHOWN(tgt[a]))) -> val[a] = 0; pc[a] = ACT }
	:: atomic { pc[a] == EVP && API(a) && SAMEPOD(a, tgt[a]) && rep[tgt[a]] == 1 && ep[tgt[a]] != mye[a] && !BLINDLY -> pc[a] = EV }
	:: atomic { pc[a] == EVP && API(a) && READY(a, tgt[a]) ->
		/* S4: the Pod is one of the template in force */
		CHECK(S4, PROVED(tgt[a]));
		/* ... and the probe began after the epoch was written */
		CHECK(S4, pep[a] == mye[a]);
		if
		:: a < ROUTERS -> evid[a] = tgt[a]; SET(adm, a)
		:: else
		fi;
		val[a] = 0;
		pc[a] = LANDED }
	:: atomic { pc[a] == LANDED && API(a) ->
		if
		:: LEASEOK(a) && MINE(a) ->
			if
			:: lph != REST || lo != tgt[a] -> lease_write(a, le, NONE, REST, tgt[a])
			:: else
			fi;
			pc[a] = ACT
		:: !(LEASEOK(a) && MINE(a)) && MINE(a) && le == mye[a] -> SET(lfresh, a)
		:: else -> lost(a)
		fi }
	/* ---------- requests ---------- */
#if ROUTERS
	:: atomic { /* a grant never waits for a probe */
		a < ROUTERS && pc[a] != DOWN && evid[a] != NONE && IS(adm, a) && IS(need, evid[a]) ->
		x = evid[a];
		if
#if defined(M_THROUGH_SERVICE) || defined(M_PROBE_NOT_OF_THIS_POD) || defined(M_NO_OWN_PROBE)
		:: USES(x) ->
#else
		:: USES(x) && IS(uok[x], a) ->
#endif
			/* S4: only to the Pod that was probed, and none that one of us has stopped */
			CHECK(S4, IS(uok[x], a));
			CHECK(S4, rep[x] || downby[x] == NONE);
			SET(st[x], a);
			CLR(need, x);
served:			skip
		:: else -> evid[a] = NONE; CLR(adm, a) /* refused: belief is dropped, the request is held again */
		fi;
		x = 0 }
#endif
	/* ---------- crash and restart ---------- */
#if CRASH
	:: atomic { a < ROUTERS && pc[a] != DOWN && crash > 0 ->
		crash--;
		stand_by(a);
		evid[a] = NONE;
		CLR(adm, a);
		mye[a] = 0;
		FREE(luid, a);
		prev[a] = 0;
		lsaw[a] = 0;
		y = 0;
		do
		:: y < NM -> CLR(st[y], a); CLR(uok[y], a); CLR(fresh[y], a); y++
		:: else -> break
		od;
		y = 0;
		CLR(lfresh, a);
		pc[a] = DOWN }
#endif
#if RESTART
	:: atomic { a < ROUTERS && pc[a] == DOWN && restart > 0 -> restart--; pc[a] = STBY }
#endif
#if OPCRASH
	:: atomic { a == OP && opcrash > 0 && pc[a] > STBY -> opcrash--; FREE(luid, a); stand_by(a) }
#endif
	od
}

/* The request whose answer nobody got is applied, late, or never. */
proctype Late()
{
end:
	do
	:: atomic { ton && !tlease ->
		if
#if defined(M_WRITE_UNCONDITIONAL)
		:: tr != 2 -> effect(tm, tr, te, twho)
#endif
#if defined(M_FENCE_UNCONDITIONAL)
		:: tr == 2 -> effect(tm, tr, te, twho)
#endif
		:: IS(fresh[tm], LATEBIT) -> effect(tm, tr, te, twho)
		:: else
		fi;
		ton = 0; tlease = 0; tcreate = 0; tm = 0; tr = 0; te = 0; twho = 0; tt = 0; tp = 0; to = 0 }
	:: atomic { ton && tlease ->
		if
		:: (tcreate && !lex) || (!tcreate && lex && IS(lfresh, LATEBIT)) ->
			lease_write(twho, te, tt, tp, to);
			/* nobody has read this version, its writer included */
			lfresh = 0
		:: else
		fi;
		ton = 0; tlease = 0; tcreate = 0; tm = 0; tr = 0; te = 0; twho = 0; tt = 0; tp = 0; to = 0 }
	:: atomic { ton -> /* never */
		ton = 0; tlease = 0; tcreate = 0; tm = 0; tr = 0; te = 0; twho = 0; tt = 0; tp = 0; to = 0 }
	od
}

#if LAG && NRS == 2
#define OLD_SET_UP(m) rs[P(m, 1 - NEWEST(m))]
#define OLD_POD_AWAITED(m) (dobs[m] && !OLD_SET_UP(m) && OREP(m) && (!robs[P(m, 1 - NEWEST(m))] || LIVE(P(m, 1 - NEWEST(m)))))
#else
#define OLD_SET_UP(m) 0
#define OLD_POD_AWAITED(m) 0
#endif
#define LIVE(p) (pst[p] == PEND || pst[p] == STARTED || pst[p] == RUN || pst[p] == FAILING)
#if NRS == 2
#define SISTER(p) BUSYGPU((p) ^ 1)
#else
#define SISTER(p) 0
#endif

#if LAG
/* The Deployment controller of one member (Recreate). */
proctype Deployment(byte m)
{
end:
	do
	:: atomic { dstep[m] == 0 && (!dobs[m] || rs[P(m, NEWEST(m))] != OREP(m) || OLD_SET_UP(m)) && !OLD_POD_AWAITED(m) ->
		dsee[m] = OREP(m); dtsee[m] = tmpl[m]; dcur[m] = 1; dstep[m] = 1 }
	:: atomic { dstep[m] == 1 ->
		if
		:: dcur[m] -> dobs[m] = 1; dnew[m] = dtsee[m]
		:: else
		fi;
		dstep[m] = 2 }
	:: atomic { dstep[m] == 2 ->
		if
#if NRS == 2
#ifdef M_ROLLING_UPDATE
		:: rs[P(m, dtsee[m])] != dsee[m] -> rs[P(m, dtsee[m])] = dsee[m]; robs[P(m, dtsee[m])] = 0; rcur[P(m, dtsee[m])] = 0
		:: rs[P(m, dtsee[m])] == dsee[m] && rs[P(m, 1 - dtsee[m])] -> rs[P(m, 1 - dtsee[m])] = 0; robs[P(m, 1 - dtsee[m])] = 0; rcur[P(m, 1 - dtsee[m])] = 0
#else
		:: rs[P(m, 1 - dtsee[m])] -> rs[P(m, 1 - dtsee[m])] = 0; robs[P(m, 1 - dtsee[m])] = 0; rcur[P(m, 1 - dtsee[m])] = 0
		:: !rs[P(m, 1 - dtsee[m])] && rs[P(m, dtsee[m])] != dsee[m] && (!dsee[m] || (robs[P(m, 1 - dtsee[m])] && !LIVE(P(m, 1 - dtsee[m])))) ->
			rs[P(m, dtsee[m])] = dsee[m]; robs[P(m, dtsee[m])] = 0; rcur[P(m, dtsee[m])] = 0
#endif
		:: else
#else
		:: rs[P(m, 0)] != dsee[m] -> rs[P(m, 0)] = dsee[m]; robs[P(m, 0)] = 0; rcur[P(m, 0)] = 0
		:: else
#endif
		fi;
		dsee[m] = 0; dtsee[m] = 0; dcur[m] = 0; dstep[m] = 0 }
	od
}
#endif

/* what an outsider had put up is gone */
inline left(m) {
	if
	:: rep[m] == 0 -> FREE(foreign, m)
	:: else
	fi
}

/* One ReplicaSet's controller and the Pod of it. */
proctype Pods(byte m; byte s)
{
	byte p = P(m, s);
end:
	do
#if LAG
	:: atomic { rstep[p] == 0 && (!robs[p] || (rs[p] && (pst[p] == ABSENT || pst[p] == FAILED)) || (!rs[p] && LIVE(p) && !pterm[p])) ->
		rsee[p] = rs[p]; rcur[p] = 1; rstep[p] = 1 }
	:: atomic { rstep[p] == 1 ->
		if
		:: rsee[p] && (pst[p] == ABSENT || pst[p] == FAILED) -> pst[p] = PEND; pterm[p] = 0; uok[m] = 0
		:: !rsee[p] && LIVE(p) -> pterm[p] = 1
		:: else
		fi;
		rstep[p] = 2 }
	:: atomic { rstep[p] == 2 ->
		if
		:: rcur[p] -> robs[p] = 1
		:: else
		fi;
		rsee[p] = 0; rcur[p] = 0; rstep[p] = 0 }
#else
	:: atomic { OREP(m) && (pst[p] == ABSENT || pst[p] == FAILED) -> pst[p] = PEND; pterm[p] = 0; uok[m] = 0 }
	:: atomic { !OREP(m) && LIVE(p) && !pterm[p] -> pterm[p] = 1 }
#endif
	/* kubelet: it may start what has just been deleted, and says Running only later */
	:: atomic { pst[p] == PEND && node == 0 ->
		/* S1 */
		CHECK(S1, IS(foreign, m) || !OTHERS(m));
		CHECK(S1, !SISTER(p));
		pst[p] = STARTED }
	:: atomic { pst[p] == PEND && pterm[p] -> pst[p] = ABSENT; pterm[p] = 0; uok[m] = 0; left(m) }
	:: atomic { pst[p] == STARTED && node == 0 -> pst[p] = RUN }
	:: atomic { (pst[p] == STARTED || pst[p] == RUN) && pterm[p] && node == 0 ->
		pst[p] = ABSENT; pterm[p] = 0; uok[m] = 0; st[m] = 0; left(m) }
	:: atomic { pst[p] == FAILED && pterm[p] -> pst[p] = ABSENT; pterm[p] = 0; uok[m] = 0 }
#if FAIL
	:: atomic { fail > 0 && pst[p] == RUN -> fail--; pst[p] = FAILING; st[m] = 0 }
	:: atomic { pst[p] == FAILING -> pst[p] = FAILED; uok[m] = 0 }
#endif
#if NODELOST
	:: atomic { lostb > 0 && pst[p] == RUN -> lostb--; node = 1; heals = 1 }
	:: atomic { lostb > 0 && pst[p] == RUN -> lostb--; node = 1 }
	:: atomic { node == 1 && heals -> /* the node is deleted: its Pods are really gone; another node takes over */
		y = 0;
		do
		:: y < NM * NRS ->
			if
			:: BUSYGPU(y) -> pst[y] = ABSENT; pterm[y] = 0; uok[y / NRS] = 0; st[y / NRS] = 0
			:: else
			fi;
			y++
		:: else -> break
		od;
		y = 0;
		heals = 0;
		node = 0 }
#endif
	od
}

#if ISVC
/*
 * One instance of the InferenceService controller; two are there while its leader changes.
 * It reads the Deployment, then the InferenceService live, then patches under the version read.
 */
byte istep[ISVC * NM];
bit isee[ISVC * NM];
byte isep[ISVC * NM];
#define I (c * NM + m)
#define WRITABLE (NUM(isep[I]) >= NUM(dep[m]))
proctype Isvc(byte c; byte m)
{
end:
	do
	:: atomic { istep[I] == 0 && (drep[m] != rep[m] || dep[m] != ep[m]) ->
#ifdef W_SERVICE_READ_FIRST
		isee[I] = rep[m]; isep[I] = ep[m];
#else
		SET(dfresh[m], c);
#endif
		istep[I] = 1 }
	:: atomic { istep[I] == 1 ->
#ifdef W_SERVICE_READ_FIRST
		SET(dfresh[m], c);
#else
		isee[I] = rep[m]; isep[I] = ep[m];
#endif
		istep[I] = 2 }
	:: atomic { istep[I] == 2 ->
		if
#ifdef M_DEPLOYMENT_UNCONDITIONAL
		:: WRITABLE ->
#elif defined(M_DEPLOYMENT_EPOCH_LOWERED)
		:: 1 ->
#else
		:: IS(dfresh[m], c) && WRITABLE ->
#endif
			if
#ifdef M_DEPLOYMENT_TWO_PATCHES
			:: dep[m] != isep[I] -> dep[m] = isep[I]; dfresh[m] = BIT(c); istep[I] = 2
			:: dep[m] == isep[I] && drep[m] != isee[I] -> CHECK(S2, !drep[m] || isee[I] || st[m] == 0); drep[m] = isee[I]; generation(m); dfresh[m] = 0; istep[I] = 0
#else
			:: dep[m] != isep[I] || drep[m] != isee[I] ->
				CHECK(S2, !drep[m] || isee[I] || st[m] == 0);
				dep[m] = isep[I]; drep[m] = isee[I]; generation(m); dfresh[m] = 0; istep[I] = 0
#endif
			:: else -> istep[I] = 0
			fi
		:: else -> istep[I] = 0
		fi;
		if
		:: istep[I] == 0 -> isee[I] = 0; isep[I] = 0; FREE(dfresh[m], c)
		:: else
		fi }
	od
}
#endif

/* Clients, people and time. */
proctype World()
{
end:
	do
	:: atomic { demands > 0 && !poolgone ->
		demands--;
		if
		:: !IS(need, 0) && INSPEC(0) -> SET(need, 0)
		:: !IS(need, 1) && !SHARED -> SET(need, 1)
#if NM == 3
		:: !IS(need, 2) && !SHARED -> SET(need, 2)
#endif
		:: else
		fi }
	/* streams end by themselves */
	:: atomic { st[0] -> if :: IS(st[0], 0) -> CLR(st[0], 0) :: IS(st[0], 1) -> CLR(st[0], 1) fi }
	:: atomic { st[1] -> if :: IS(st[1], 0) -> CLR(st[1], 0) :: IS(st[1], 1) -> CLR(st[1], 1) fi }
#if NM == 3
	:: atomic { st[2] -> if :: IS(st[2], 0) -> CLR(st[2], 0) :: IS(st[2], 1) -> CLR(st[2], 1) fi }
#endif
#ifndef M_LEASE_NEVER_RUNS_OUT
	/* 15 s without renewal: always for a holder that is dead, once for one that only sleeps */
	:: atomic { lex && lh < NONE && !lexp && (lh < ROUTERS && (pc[lh] == DOWN || IS(cut, lh))) -> lexp = 1 }
#if OPERATOR
	:: atomic { lex && lh == OP && !lexp && pc[OP] == STBY -> lexp = 1 }
#endif
	:: atomic { lex && lh < NONE && !lexp && asleep > 0 -> asleep--; lexp = 1 }
#endif
	:: atomic { (!lex || lexp || lh == NONE) && !l60 && NOROUTER -> l60 = 1 }
#if CUT
	:: atomic { cutb > 0 && pc[0] != DOWN ->
		cutb--;
		SET(cut, 0);
		if
		:: evid[0] != NONE && IS(adm, 0) ->
			if
			:: IS(uok[evid[0]], 0) -> gev = evid[0]
			:: else
			fi
		:: else
		fi;
		if
		:: heals = 1
		:: heals = 0
		fi;
#ifdef M_LOSS_STOPS_SERVING
		evid[0] = NONE;
#endif
	}
	:: atomic { IS(cut, 0) && heals -> CLR(cut, 0); gev = NONE; heals = 0 }
#endif
#if DELETE
	:: atomic { del > 0 && lex ->
		del--; lex = 0; lh = NONE; lexp = 0; le = 0; lt = NONE; lph = REST; lo = NONE; lfresh = 0; luid = 0; gle = 0 }
#endif
#if RESTORE
	/* somebody keeps a copy, and applies it later over a deleted Lease */
	:: atomic { restore == 2 && lex && lh < ROUTERS && le > 0 -> restore--; old_h = lh; old_e = le }
	:: atomic { restore == 1 && lex && NUM(le) > NUM(old_e) ->
		restore--; linc++; lh = old_h; le = old_e; gle = old_e; lexp = 0; lt = NONE; lph = REST; lo = NONE; lfresh = 0; luid = 0; old_h = NONE; old_e = 0 }
#endif
#if UNDO
	:: atomic { undo > 0 ->
		undo--;
		if
		:: x = 0
		:: x = 1
		fi;
		tmpl[x] = 1 - tmpl[x];
		if
		:: NUM(ep[x]) > 1 -> ep[x] = ep[x] - 4
		:: else -> ep[x] = 0
		fi;
		touch(x);
		generation(x);
		x = 0 }
#endif
#if FOREIGN
	:: atomic { flips < FOREIGN && (!HPA || fixes == flips) ->
		if
		:: x = 0
		:: x = 1
		fi;
		flips++;
		rep[x] = 1 - rep[x];
		if
		:: rep[x] -> SET(foreign, x)
		:: else -> downby[x] = NONE
		fi;
		touch(x);
		generation(x);
		x = 0 }
#endif
#if HAND
	:: atomic { hand == NONE && !rep[1] && lh == NONE && lo == 0 && pst[0] == RUN ->
		hand = 1; rep[1] = 1; SET(foreign, 1); touch(1); generation(1) }
#endif
#if REMOVE
	:: atomic { INSPEC(0) && NM > 1 -> CLR(spec, 0); CLR(need, 0) }
#endif
#if POOLGONE
	:: atomic { !poolgone -> poolgone = 1; need = 0; demands = 0 }
	:: atomic { poolgone && ep[0] && 1 ->
#ifdef M_POOL_DELETION_SCALES
		CHECK(S2, st[0] == 0); rep[0] = 0;
#endif
#ifndef M_POOL_DELETION_LEAVES
		ep[0] = 0;
#else
		0;
#endif
		touch(0) }
	:: atomic { poolgone && ep[1] ->
#ifdef M_POOL_DELETION_LEAVES
		0;
#endif
		ep[1] = 0; touch(1) }
	:: atomic { poolgone && !ep[0] && !ep[1] && lex -> lex = 0; lh = NONE; lexp = 0; le = 0; lt = NONE; lph = REST; lo = NONE; lfresh = 0; luid = 0; gle = 0 }
#endif
	od
}

#if ROUTERS == 2
#define ABLE ((pc[0] != DOWN && !IS(cut, 0)) || (pc[1] != DOWN && !IS(cut, 1)))
#elif ROUTERS == 1
#define ABLE (pc[0] != DOWN && !IS(cut, 0))
#else
#define ABLE 0
#endif

/*
 * L1 and L8: when nothing more can happen, everybody has been served and the pool is at rest. Every run
 * comes to such an end because no fault repeats for ever and the graph of states has no cycle, which
 * run_model.py has checked as well.
 */
proctype Rest()
{
end:
	atomic { timeout ->
#if POOLGONE
		CHECK(ENDS, !poolgone || (!lex && ep[0] == 0 && ep[1] == 0));
#elif NOPROBE
		/* a holder that is deposed and lives on blocks the unload of what cannot be asked */
		CHECK(L1, !(ABLE) || need == 0 || UP >= 1);
#else
		if
		:: node == 1 -> skip /* waits for the node to be deleted, or for a person */
		:: node != 1 && CONTESTED -> skip
		:: else ->
			CHECK(L1, !(ABLE) || (need & spec) == 0);
			CHECK(ENDS, !(OPERATOR || ABLE) || UP == 1 + SHARED);
			CHECK(ENDS, !(OPERATOR || ABLE) || !STRAY)
		fi;
#endif
#if CUT
		/* L7: a router that is cut off serves on while nobody has taken its place */
		CHECK(L7, !(IS(cut, 0) && gev != NONE && pc[0] != DOWN && lh == 0 && IS(uok[gev], 0)) || !IS(need, gev));
#endif
#if HAND
		CHECK(ENDS, hand == NONE || rep[hand]);
#endif
#if HPA
		CHECK(CONTEST, fixes <= 2);
#endif
reached:	skip
	}
}

init
{
	atomic {
		lh = NONE;
		lt = NONE;
		lo = NONE;
		spec = BIT(NM) - 1;
		x = 0;
		do
		:: x < NA -> pc[x] = STBY; evid[x] = NONE; prev[x] = NONE; x++
		:: else -> break
		od;
		x = 0;
		do
		:: x < NM ->
			downby[x] = NONE;
#if LAG
			dobs[x] = 1;
			robs[P(x, 0)] = 1;
#if NRS == 2
			robs[P(x, 1)] = 1;
#endif
#endif
			x++
		:: else -> break
		od;
		x = 0;
#if !COLD
		rep[0] = 1;
		pst[P(0, 0)] = RUN;
#if ISVC
		drep[0] = 1;
#endif
#if LAG
		rs[P(0, 0)] = 1;
#endif
#endif
#if SHARED
		rep[NM - 1] = 1;
		SET(foreign, NM - 1);
		pst[P(NM - 1, 0)] = RUN;
#endif
		do
		:: x < NA -> run Actor(x); x++
		:: else -> break
		od;
		x = 0;
		do
		:: x < NM ->
#if LAG
			run Deployment(x);
#endif
			y = 0;
			do
			:: y < NRS -> run Pods(x, y); y++
			:: else -> break
			od;
#if ISVC
			y = 0;
			do
			:: y < ISVC -> run Isvc(y, x); y++
			:: else -> break
			od;
#endif
			x++
		:: else -> break
		od;
		x = 0;
		y = 0;
		run Late();
		run World();
		run Rest()
	}
}
